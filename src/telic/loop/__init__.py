"""When things happen: events, filters, handlers, metrics of an epoch. No gradients, no JAX transforms."""
