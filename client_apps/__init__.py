"""Client side: the ClientApp and the operator of one shard."""
