//! What several tests share.

pub mod clusters;
