#include "isa.h"

#include <cstring>

namespace pagefleet {
namespace {
Isa current = Isa::none;
}

Isa current_isa() { return current; }

void set_current_isa(Isa isa) { current = isa; }

Isa isa_from_name(const char* name) {
    static const struct {
        const char* name;
        Isa isa;
    } known[] = {
        {"avx2", Isa::avx2},
        {"avx512", Isa::avx512},
        {"avx512_vnni", Isa::avx512_vnni},
        {"avx512_bf16", Isa::avx512_bf16},
        {"amx", Isa::amx},
    };
    for (const auto& entry : known)
        if (std::strcmp(entry.name, name) == 0) return entry.isa;
    return Isa::none;
}

}  // namespace pagefleet
