"""A decoder-only transformer: configuration, module, and the parts it is made of."""

from telic.models.decoder.cache import Cache
from telic.models.decoder.config import DecoderConfig, Experts
from telic.models.decoder.kernels import Visible, attention_kernels
from telic.models.decoder.layers import stack_layers, unstack_layers
from telic.models.decoder.module import Decoder
from telic.models.decoder.outputs import Head, HiddenStates
from telic.models.decoder.rotary import LinearScaling, Llama3Scaling, Rotary, YarnScaling
from telic.models.decoder.routing import RouterStatistics

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "Head",
    "HiddenStates",
    "LinearScaling",
    "Llama3Scaling",
    "Rotary",
    "RouterStatistics",
    "Visible",
    "YarnScaling",
    "attention_kernels",
    "stack_layers",
    "unstack_layers",
]
