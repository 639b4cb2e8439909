"""`polyrl bench weights`: how fast versions move, beside iperf3, memcpy and mooncake, in one run."""
