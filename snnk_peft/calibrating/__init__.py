"""The calibrate verb: batches are checked, passes are scheduled, parts are fitted, all or nothing."""
