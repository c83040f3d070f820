"""Tables of the notebook: answers of the evaluation and times of the benchmarks."""
