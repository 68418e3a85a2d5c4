// The instruction set that every kernel of this process runs on. Python chooses it (it knows the processor and what the
// user masks); a kernel family keeps one table of functions a level and looks its table up by `current_isa()`.
#pragma once

namespace pagefleet {

// Each level has what the ones before it have.
enum class Isa { none, avx2, avx512, avx512_vnni, avx512_bf16, amx };

Isa current_isa();
void set_current_isa(Isa isa);
Isa isa_from_name(const char* name);  // Isa::none for a name that is unknown here

}  // namespace pagefleet
