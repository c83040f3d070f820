"""Where keys and values live: the resident rows on the device, the retrieval zone on the host."""
