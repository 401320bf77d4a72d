//! The engine on synthetic models, which can be longer than the fixtures.

mod layouts;
mod long_context;
mod simulation;
