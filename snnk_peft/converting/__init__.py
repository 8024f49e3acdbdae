"""The convert verb: data become batches; plan, patch, calibrate, bundle and recover follow; one report of it all."""
