"""Steps envs with a policy into preallocated memory."""
