//! Certificates of the link: the authorities, when they rotate, and where they are kept.

pub mod ca;
pub mod certificates;
