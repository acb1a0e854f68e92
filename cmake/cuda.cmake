# MXFLASH_CUDA=ON: the CUDA language for Hopper, and CUTLASS's headers as the target mxflash_cutlass.

# Folder of a Python package that has `file`: of the Python that builds ours, or of the one scripts/setup.sh gpu fills.
function(python_package_folder package file result)
  set(
    code
    "import importlib.util as i; s = i.find_spec('${package}'); print(s.submodule_search_locations[0] if s else '')"
  )
  foreach(python IN ITEMS ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    execute_process(COMMAND ${python} -c "${code}" OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(folder AND EXISTS ${folder}/${file})
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

# The compiler that scripts/setup.sh gpu installs, unless another is asked for; where it is not installed, that of PATH.
python_package_folder(nvidia.cu13 bin/nvcc cuda_folder)
if(cuda_folder AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER ${cuda_folder}/bin/nvcc)
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
set(CMAKE_CUDA_ARCHITECTURES 90a-real) # The "a": warpgroup products exist on Hopper and nowhere else.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "MXFLASH_CUDA=ON and no nvcc found: run scripts/setup.sh gpu, or set CMAKE_CUDA_COMPILER")
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20") # CMake 3.25 does not know that nvcc has it.
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # A program starts, and says why not, where no CUDA is installed.

python_package_folder(cutlass_library source/include/cutlass/cutlass.h cutlass_folder)
set(MXFLASH_CUTLASS "${cutlass_folder}/source/include" CACHE PATH "Folder with cutlass/cutlass.h and cute/")
if(NOT EXISTS ${MXFLASH_CUTLASS}/cutlass/cutlass.h)
  message(
    FATAL_ERROR
    "MXFLASH_CUTLASS: no cutlass/cutlass.h in '${MXFLASH_CUTLASS}'; run scripts/setup.sh gpu, or name the folder"
  )
endif()
add_library(mxflash_cutlass INTERFACE)
target_include_directories(mxflash_cutlass SYSTEM INTERFACE ${MXFLASH_CUTLASS})
# The runtime's headers for the sources that nvcc does not compile.
target_include_directories(mxflash_cutlass SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
