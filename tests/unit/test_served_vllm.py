"""How a vLLM server is started, without one."""

from itertools import pairwise

import pytest
from tests.engines import standins

from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig
from polyrl.engines.served.vllm import VllmServer

TOKEN_BYTES = 2 * 2 * 128 * 4
"""Keys and values of two layers of 128 numbers, in float32."""


def flags(tmp_path, **settings) -> dict[str, str]:
    config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), **settings)
    argv = VllmServer(Http("http://127.0.0.1:1"), config).command(1).argv
    return dict(pairwise(argv))


@pytest.mark.parametrize(("kv_tokens", "context", "num_blocks"), [(1024, 1024, 9), (1000, 1000, 9), (8192, 4096, 65)])
def test_a_context_as_large_as_the_cache_fits_beside_the_block_that_the_server_keeps(
    kv_tokens, context, num_blocks, tmp_path
):
    on_cpu = flags(tmp_path, device="cpu", kv_tokens=kv_tokens)
    assert int(on_cpu["--max-model-len"]) == context
    assert int(on_cpu["--kv-cache-memory-bytes"]) == num_blocks * 128 * TOKEN_BYTES
    on_gpu = flags(tmp_path, device="gpu", kv_tokens=kv_tokens)
    assert int(on_gpu["--num-gpu-blocks-override"]) == -(-kv_tokens // 16) + 1
