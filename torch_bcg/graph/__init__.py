"""FX in, plain data out: facts, partition, plan, lowering. No CUDA, no tensor that holds data."""
