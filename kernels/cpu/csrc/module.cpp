// `pagefleet.kernels.cpu._native`: each family of kernels brings a table of methods.
#include "isa.h"
#include "python.h"

#include <initializer_list>

namespace pagefleet {
extern PyMethodDef attention_methods[];
extern PyMethodDef heads_methods[];
extern PyMethodDef kv_methods[];
extern PyMethodDef linear_methods[];
extern PyMethodDef rows_methods[];
extern PyMethodDef selection_methods[];
}

namespace {

PyObject* set_isa(PyObject*, PyObject* const* values, Py_ssize_t count) {
    if (count != 1) {
        PyErr_SetString(PyExc_TypeError, "set_isa takes the name of an instruction set");
        return nullptr;
    }
    Py_ssize_t length = 0;
    const char* name = PyUnicode_AsUTF8AndSize(values[0], &length);
    if (name == nullptr) return nullptr;
    const pagefleet::Isa isa = pagefleet::isa_from_name(name);
    if (isa == pagefleet::Isa::none) {
        PyErr_Format(PyExc_ValueError, "there are no compiled kernels for instruction set '%s'", name);
        return nullptr;
    }
    pagefleet::set_current_isa(isa);
    Py_RETURN_NONE;
}

PyMethodDef module_methods[] = {
    pagefleet::method("set_isa", set_isa, "set_isa(name): choose the kernels that all later calls run."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled kernels of the CPU backend; see pagefleet.kernels.cpu.", -1, module_methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    for (PyMethodDef* table : {pagefleet::attention_methods, pagefleet::heads_methods, pagefleet::kv_methods,
                               pagefleet::linear_methods,
                               pagefleet::rows_methods, pagefleet::selection_methods}) {
        if (PyModule_AddFunctions(module, table) < 0) {
            Py_DECREF(module);
            return nullptr;
        }
    }
    return module;
}
