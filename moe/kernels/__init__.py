"""GPU operators of the MoE layer, one per file.

Each file reads from metal to API: plain torch reference (`*_ref`, any device and dtype) → Triton
kernel → launcher → custom op with its fake → autograd → public function with a `backend` argument.
Nothing here knows about modules, parameters or training; import what you need from the file of the
operator.
"""
