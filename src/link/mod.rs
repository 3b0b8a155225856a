//! Where controller, gateway and worker meet: the messages they exchange, and both ends of the link.
//!
//! Two hops. Pod ⇄ controller ([`messages`]): HTTPS, an audience-bound token, the gateway speaks for its pod.
//! Worker ⇄ gateway ([`socket`]): HTTP on a Unix socket in a volume that only those two mount.
//! Everything is a total or a level, never a delta, so that repeats do no harm; unknown fields are ignored.
//! Owns no decision about loops: those are the engine's and the controller's.

pub mod client;
pub mod deliveries;
pub mod events;
mod events_route;
pub mod messages;
pub mod pod;
pub mod sensor_messages;
pub mod server;
pub mod socket;
