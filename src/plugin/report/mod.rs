//! `report`: an archive for a bug report, from what the user may read.
//!
//! What may be in it is decided by [`redaction`], which keeps only what it knows to be harmless. Nothing is sent anywhere.

pub mod archive;
pub mod redaction;
pub mod sources;

#[cfg(test)]
mod tests;
