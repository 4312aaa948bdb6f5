"""``deepspeed.ops.adam``: Adam by DeepSpeed's names and arguments, to be passed as ``optimizer=``.

They are torch's until ``initialize`` shards them. Where states live is up to the configuration.
"""

import torch


class FusedAdam(torch.optim.Adam):
    """``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode`` false."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if not bias_correction:
            raise ValueError(f"zero_ext: {type(self).__name__} corrects biases. Leave it out.")
        self.adam_w_mode = bool(adam_w_mode)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=self.adam_w_mode,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """As ``FusedAdam``, with other names of the arguments."""

    def __init__(
        self,
        model_params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        if not fp32_optimizer_states:
            raise ValueError("zero_ext: DeepSpeedCPUAdam has fp32 states. Leave it out.")
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )
