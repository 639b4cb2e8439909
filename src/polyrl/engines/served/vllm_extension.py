"""Put into every worker of a vLLM server by its flag `--worker-extension-cls`: takes a version from a PolyRL worker,
and reports log-probabilities as other engines do.

Runs in the server's environment; see `taking`. vLLM's own loaders take each rank's slice out of the whole tensors.
"""

# pyright: reportMissingImports=false
from typing import Any

from polyrl.engines.served.taking import Rank, Tensors, take
from polyrl.engines.served.vllm_sampling import tell_policy


class PolyrlExtension:
    """Its methods become methods of vLLM's worker, so they carry our name."""

    def polyrl_tell_policy(self) -> None:
        tell_policy()

    def polyrl_install(self, socket_name: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        worker: Any = self
        runner, config = worker.model_runner, worker.vllm_config
        model = runner.get_model()

        def load(tensors: Tensors) -> None:
            runner.reload_weights(weights_iterator=tensors)
            _process_tied_tables(model)

        num_ranks = config.parallel_config.world_size
        rank = Rank(worker.rank, num_ranks, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        with set_current_vllm_config(config):
            take(socket_name, rank, model, load)


def _process_tied_tables(model: Any) -> None:
    """Of layers that share a table, `reload_weights` processes one. On the CPU the head keeps the table packed, and
    would go on with the old one: embeddings of the new version, logits of the old."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    seen: set[int] = set()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            if id(layer.weight) in seen:
                method.process_weights_after_loading(layer)
            seen.add(id(layer.weight))
