// Arguments of a kernel as Python passes them: integers, addresses (of tensors: `data_ptr()`) and floats, in order.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>

namespace pagefleet {

class Arguments {
public:
    Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}

    // Raises TypeError in Python and returns false unless there are `expected` arguments.
    bool count_is(Py_ssize_t expected) const {
        if (count_ == expected) return true;
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count_);
        return false;
    }

    int64_t integer() { return PyLong_AsLongLong(values_[next_++]); }
    bool boolean() { return integer() != 0; }
    float real() { return static_cast<float>(PyFloat_AsDouble(values_[next_++])); }

    // An address; 0 is a null pointer: something optional that is absent.
    template <typename T>
    T* pointer() {
        return reinterpret_cast<T*>(static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(values_[next_++])));
    }

    // False, with the exception set in Python, if an argument was no number.
    static bool good() { return PyErr_Occurred() == nullptr; }

private:
    PyObject* const* values_;
    Py_ssize_t count_;
    Py_ssize_t next_ = 0;
};

// One row of a method table for a function of METH_FASTCALL form.
using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyMethodDef method(const char* name, FastFunction function, const char* doc) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc};
}

}  // namespace pagefleet
