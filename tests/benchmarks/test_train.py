"""The trainer beside plain loops: every ratio is there."""

from benchmarks.train import measure

from polyrl.bench.train import TrainWork, table


def test_the_loops_of_others_take_turns_with_ours():
    result = measure(TrainWork(pack_tokens=128, num_groups=1, shorter=512, repetitions=1))
    assert all(one["ratio_to_padded"] > 0 for one in result["packing"].values())
    assert result["unpadded"]["ratio_to_unpadded"] > 0 and result["unpadded"]["plain_tflops"] > 0
    assert set(result["goals"]) == {"streaming_overhead", "fraction_of_limit", "ratio_to_unpadded"}
    assert "ratio to unpadded" in "\n".join(table(result))
