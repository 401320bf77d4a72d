//! Expert workers on other machines.
//!
//! `wire` has the messages: pure functions and readers over bytes. `identity` says what peers must
//! agree with, `session` what each side does with the other's bytes. None of them has sockets,
//! threads or clocks. `worker` computes routed experts for whoever asks over TCP, `coordinator`
//! asks. They know nothing of attention, sessions or tokens, and hold no weight but routed experts.

pub mod coordinator;
pub mod identity;
mod items;
#[cfg(feature = "mutations")]
pub mod mutation;
pub mod registry;
pub mod relay;
pub mod session;
mod tcp;
pub mod wire;
pub mod worker;
