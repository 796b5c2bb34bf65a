"""GPU kernels, one folder an op, each with its specification in plain jnp."""
