"""What loading and computing cost: a device's measured cost model, the loading controller that decides by it for each
prompt, and where to keep caches (`devices`)."""
