"""What the data of every task shares: batch samplers, loaders that resume, and seeds."""
