"""Weight versions: what a version is, how the difference of two travels, and how it gets into an engine.

| module | holds |
|---|---|
| `manifest` | what a version consists of, in canonical bytes with one digest; the same for a delta |
| `chunks` | any blob in pieces of fixed size, each with a digest |
| `delta` | two versions in, their difference in a hundredth of the bytes out; and back, in place |
| `chains` | the cheapest way from the version that is held to the one that is wanted |
| `folder` | a version as a directory of safetensors |
| `tensors` `tensors_gpu` | the only modules that know torch: a model's weights out and in; deltas made on the device |
| `settings` | what can be set about moving weights; `TransferError` |
| `server` `peer` | the trainer's side, which publishes; a worker's side, which pulls, holds and relays |
| `pull` `fetch` `shelf` | one pull; one blob from several sources at once; what a worker keeps |
| `buffers` `store` | shared memory without a name; the blobs in it, their verified chunks, and who reads them |
| `protocol` `channel` | what is said, without sockets; one connection on which every wait has a deadline |
| `sender` `receiver` | the two ends of a connection |
| `interfaces` `pace` `mooncake` | local addresses inside networks; a bandwidth that is kept; a transport for RDMA |

Rules: nothing is used before its digest is right; numbers out of a manifest are checked before they are believed; a
delta is applied by one owner, in place, to bytes nobody else reads.
"""
