"""Weight versions: what a version is, how the difference between two travels, and how a version gets into an engine.

| module | holds |
|---|---|
| `manifest` | the parts of a version, as canonical bytes with one digest; the same for a delta |
| `chunks` | a blob in pieces of fixed size, each with a digest |
| `delta` | the difference between two versions, in about a hundredth of their bytes, and applying it in place |
| `chains` | the cheapest way from the version that is held to the version that is wanted |
| `folder` | a version as a directory of safetensors |
| `tensors` `tensors_gpu` `adapters` | all that uses torch: weights out of and into a model; deltas; LoRA |
| `settings` | the settings of weight transfer; `TransferError` |
| `server` `peer` | the trainer's side, which publishes; a worker's side, which pulls, holds and relays |
| `pull` `fetch` `shelf` | one pull; one blob from several sources at once; the buffers that a worker keeps |
| `buffers` `store` | anonymous shared memory; the blobs in it, their verified chunks and their readers |
| `protocol` `channel` | the messages, without sockets; one connection on which every wait has a deadline |
| `sender` `receiver` | the two ends of a connection |
| `interfaces` `pace` `mooncake` | local addresses inside given networks; a bandwidth limit; a transport for RDMA |

Rules: no bytes are used before their digest has been checked; numbers in a manifest are checked before they are used; a
delta is applied by one owner, in place, to bytes that have no other reader.
"""
