"""Functions on tensors: what a device computes, without knowing models, sequences or Ray.

The import name is shared with a Hugging Face package that `transformers` probes for. This module therefore imports
nothing and carries a version that the probe rejects.
"""

__version__ = "0.0.0"
