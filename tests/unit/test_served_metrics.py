"""Figures of a server: read from its page, one of each engine, and made one."""

import asyncio

import pytest

from polyrl.engines.served.http import Http, read_gauges
from polyrl.engines.served.server import ServedConfig, ServerLoad
from polyrl.engines.served.sglang import SglangServer
from polyrl.engines.served.vllm import VllmServer

PAGES = {
    VllmServer: """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting{engine="1"} NaN
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 2.0
""",
    SglangServer: """
sglang:num_running_reqs{dp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1"} 4.0
sglang:num_queue_reqs{dp_rank="0"} 1.0
sglang:num_queue_reqs{dp_rank="1"} NaN
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.75
sglang:num_retracted_reqs{dp_rank="0"} 2.0
""",
}


class Page(Http):
    """A server of which only a page is there."""

    def __init__(self, page: str) -> None:
        super().__init__("http://nowhere")
        self._page = page

    async def get(self, path: str, *, timeout_s: float, text: bool = False) -> str:
        assert path == "/metrics"
        return self._page


def test_figures_are_read_one_of_each_engine_and_what_is_no_number_is_left_out():
    page = '# TYPE vllm:a gauge\nvllm:a{engine="0"} 1.0\nvllm:a{engine="1"} 2.0\nvllm:b 0.25\nother:a 9\nvllm:c no\n'
    assert read_gauges(f"{page}vllm:b NaN\nvllm:d +Inf\n", "vllm:") == {"a": [1.0, 2.0], "b": [0.25]}


@pytest.mark.parametrize("kind", PAGES)
def test_counts_of_several_engines_are_added_up_and_of_shares_the_largest_is_told(kind):
    server = kind(Page(PAGES[kind]), ServedConfig(model="none"))
    assert asyncio.run(server.load()) == ServerLoad(num_running=7, num_waiting=1, kv_used=0.75, num_preemptions=2)


@pytest.mark.parametrize("kind", PAGES)
def test_a_server_that_tells_nothing_is_idle(kind):
    server = kind(Page(""), ServedConfig(model="none"))
    assert asyncio.run(server.load()) == ServerLoad(num_running=0, num_waiting=0, kv_used=0.0, num_preemptions=0)
