"""Checkpoints are data: reading one executes nothing, and a changed bit is found.

A checkpoint is a folder. All ranks have to see it::

    step-00000012/
        pipeplan.json             steps, settings, and a checksum for each tensor and for itself
        stage-000.safetensors     the tensors of the first stage, under their names in the model
        stage-001.safetensors     ...
        stage-001-001.safetensors the optimizer's share of its second replica, if it is shared out
        state.safetensors         tensors that belong to no stage

A tensor that several ranks hold is written once: by the first replica of the first stage that holds
it. Reading needs no plan, so any other plan can continue.

`tensor_files`, `descriptions`, `folders` and `exporting` do not need torch.
"""
