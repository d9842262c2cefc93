"""What holds a model's weights and optimizer states and takes a training step.

    base         the protocol of all engines, groups of parameters, and the guard that skips steps
    optimizer    what an engine asks of an optimizer, and what the optimizer is given to update
    local        one process that holds everything
    sharded      what engines share that split a model over processes: norm, shards, checks
    fsdp2        ZeRO-3 by PyTorch's FSDP2
    deepspeed    ZeRO-3 by DeepSpeed (an optional package), with offload
    choose       which engine a run uses, and making it
    gradients    sums of gradients and their norm
    rounding     stochastic rounding to bfloat16

The rules of optimizers are not here (training/optim/): engines know none by name.
"""
