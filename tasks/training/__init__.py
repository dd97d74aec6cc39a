"""What every task shares while it trains: the Lightning module, callbacks, run folders, resume and checkpoints."""
