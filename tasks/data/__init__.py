"""What the data of all tasks share: samplers, loaders that resume, units of batches, and seeds."""
