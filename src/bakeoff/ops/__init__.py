"""The ops: one folder each, one line here each, and token_order, which orders what they attend to.
Importing this declares them all; none imports triton."""

from bakeoff.ops.adamw import adamw_ as adamw_
from bakeoff.ops.adamw import global_norm as global_norm
from bakeoff.ops.attention import attention as attention
from bakeoff.ops.byte_spectral import byte_spectral as byte_spectral
from bakeoff.ops.dilated_attention import dilated_attention as dilated_attention
from bakeoff.ops.fp8_linear import fp8_linear as fp8_linear
from bakeoff.ops.layer_norm import layer_norm as layer_norm
from bakeoff.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from bakeoff.ops.long_conv import long_conv as long_conv
from bakeoff.ops.memory_scan import memory_scan as memory_scan
from bakeoff.ops.memory_update import memory_update as memory_update
from bakeoff.ops.memory_update import memory_update_ as memory_update_
from bakeoff.ops.muon import muon_ as muon_
from bakeoff.ops.norm_linear import norm_linear as norm_linear
from bakeoff.ops.pole_scan import pole_scan as pole_scan
from bakeoff.ops.qkv_rotary import qkv_rotary as qkv_rotary
from bakeoff.ops.rms_norm import rms_norm as rms_norm
from bakeoff.ops.rotary import rotary as rotary
from bakeoff.ops.rotary_append import rotary_append_ as rotary_append_
from bakeoff.ops.short_conv import short_conv as short_conv
from bakeoff.ops.spectral_filter import spectral_filter as spectral_filter
from bakeoff.ops.swiglu import swiglu as swiglu
from bakeoff.token_order import token_order as token_order
