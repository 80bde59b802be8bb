"""What a keeper and those who talk with it have in common: the protocol, the record, finding and starting keepers."""
