//! Gates of Agents between the link, their annotations and the webhook: announcements, and the answers of people.

pub(super) mod announcements;
pub mod answers;
pub mod webhook;
