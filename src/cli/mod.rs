//! The command line: one file a subcommand; every flag has an environment twin.
