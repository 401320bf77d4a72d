//! The engine against its references and against itself.

mod exactness;
mod generation;
mod golden;
mod oracle;
mod support;
