"""Engines of other projects, as they ship: a vLLM or an SGLang server in a process of its own, spoken to over HTTP.

    engine        ServedEngine: the contract over any `Server`; stamps versions, refuses
    answers       a sample's stay at a server: what is asked, what came, how it ended
    keeper        one life of a server after the other: starts it, watches it, starts it again
    process       the child process: its port, its log, its death
    server        settings; what is asked of a kind of server (`Server`) and of how it takes weights (`WeightLoading`)
    vllm sglang   a kind of server: its flags, what it says of itself, its streams, its load; how it takes weights
    http          requests and event streams, with the server's key; figures from its metrics page
    installing    an install, in the worker: brought near; found to fit; handed over; verified
    inside        what runs in a server's own processes: takes a version; answers no request without the key
    between       what both sides must agree on
    versions      the versions of the servers that PolyRL is tested with

An install, as ServedEngine plays it; everything but the first stage happens while the server stands still:

    staged = await loading.stage(weights)         samples go on
    await loading.pause()                         no token is written any more; running samples keep their place
    (all that was written is heard: the stamps of both versions are right)
    await loading.put(staged)                     in place, and verified; the server's own label is str(version)
    await loading.resume()                        always, also when `put` failed

`put` raises EngineError when the old weights still run, and ServerBroken when it is unknown which run: the server is
then ended and started again. It is started with the flags and the environment of its `WeightLoading` beside its own.
"""
