"""Weight transfers beside iperf3 and mooncake, and over links of their own in network namespaces."""
