"""Engines of other projects, as they ship: a vLLM or an SGLang server in a process of its own, spoken to over HTTP.

    engine                         ServedEngine: the contract over any `Server`; stamps versions, refuses
    keeper                         one life of a server after the other: starts it, watches it, starts it again
    process                        the child process: its port, its log, its death
    server                         what is asked of a kind of server (`Server`) and of how it takes weights (`Weighing`)
    vllm sglang                    a kind of server: its flags, what it says of itself, a stream of tokens, its load
    http metrics                   requests and event streams, with the server's key; reading its figures
    machine model_files versions   what the machine is like; what the model's directory says; what we are tested with

    vllm_weights sglang_weights    a kind of server's `Weighing`: how it takes weights, through public hooks only
    staging checking handing       an install, in the worker: brought near; found to fit, and to be there; handed over
    taking between                 in the server: taken by a rank; what both sides must agree on
    vllm_extension sglang_loader vllm_guard    what a server calls of ours: to take a version; to answer nobody but us
    vllm_sampling                              what vLLM reports of truncated samples, as every engine does

An install, as ServedEngine plays it; everything but the first stage happens while the server stands still:

    staged = await weighing.stage(weights)         samples go on
    await weighing.pause()                         no token is written any more; running samples keep their place
    (all that was written is heard: the stamps of both versions are right)
    await weighing.put(staged)                     in place, and verified; the server's own label is str(version)
    await weighing.resume()                        always, also when `put` failed

`put` raises EngineError when the old weights still run, and ServerBroken when nobody knows what runs: the server is
then ended and started again. It is started with `Weighing.flags()` and `Weighing.environment()` beside its own.
"""
