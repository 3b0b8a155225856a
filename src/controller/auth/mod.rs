//! Who may do what: identifies pods and users by their tokens, and checks the permissions of users.

pub mod access;
pub mod identity;
pub mod metrics_access;
pub(super) mod review_limiter;
