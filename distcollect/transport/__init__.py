"""The way a trainer calls its workers and fetches rollouts.

Only :mod:`distcollect.transport.rpc` touches ``torch.distributed.rpc``.
"""
