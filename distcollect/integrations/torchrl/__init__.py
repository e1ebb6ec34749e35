"""TorchRL's envs, policies, names of arguments, and ways to send weights."""
