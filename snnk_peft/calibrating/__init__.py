"""What the calibrate verb does: batches are checked, passes are scheduled, parts are fitted, all or nothing."""
