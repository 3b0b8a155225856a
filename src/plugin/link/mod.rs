//! The controller's link, as a user reaches it: events of Agents, and tasks for them.
//!
//! Owns the connection (a port-forward through the API server, or a URL), the token, and what is done when a stream
//! ends. The messages are those of [`crate::link`].

mod followed_events;
mod port_forward;
mod user_link;
mod user_token;

pub use followed_events::FollowedEvents;
pub use user_link::{EventCursor, LinkFailure, SubmissionReceipt, TaskSubmission, UserLink};
pub use user_token::UserToken;

/// How the controller is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkRoute {
    /// A port-forward through the API server to the pod of the leader.
    PortForward,
    /// This URL.
    Direct(String),
}
