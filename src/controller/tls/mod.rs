//! Certificates of the link and of /metrics: the authorities, when they rotate, and where they are kept.

pub mod ca;
pub mod certificates;
pub mod metrics;
