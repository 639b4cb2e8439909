"""Engines of other projects, as they ship: a vLLM or an SGLang server in a process of its own, spoken to over HTTP.

    engine    ServedEngine: the contract of engines/engine.py over any `Server`; stamps versions, restarts, refuses
    server    what ServedEngine asks of a kind of server (`Server`), and of its way to take weights (`Weighing`)
    vllm sglang                    a kind of server: its flags, what it says of itself, a stream of tokens, its load
    vllm_weights sglang_weights    a kind of server's `Weighing`: how it takes weights, through public hooks only
    process   the child process: its port, its log, its death
    http      requests and event streams, with deadlines and errors in a line; every request carries the server's key

An install, as ServedEngine plays it; everything but the first stage happens while the server stands still:

    staged = await weighing.stage(weights)         samples go on
    await weighing.pause()                         no token is written any more; running samples keep their place
    (all that was written is heard: the stamps of both versions are right)
    await weighing.put(staged)                     in place, and verified; the server's own label is str(version)
    await weighing.resume()                        always, also when `put` failed

`put` raises EngineError when the old weights still run, and ServerBroken when nobody knows what runs: the server is
then ended and started again. It is started with `Weighing.flags()` and `Weighing.environment()` beside its own.
"""
