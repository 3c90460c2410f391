"""The products and kernels of training on torch tensors, for a GPU or any device.

Nothing here is imported where no device is used: torch takes a second to import, which
deployment would pay per message. :mod:`tp_flower.device.choice` alone may be.
"""
