"""Growth curves: time, traffic and memory of each way to split a model, from 4 to 4096 ranks, without running any."""
