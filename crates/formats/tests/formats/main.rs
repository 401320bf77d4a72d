//! Every format: decoders against an independent implementation, encoders by their error, layouts
//! by round trips, and every kernel at every level against the rules written out.

mod decoders;
mod encoders;
mod kernels;
mod support;
