// The form of a new run: says which power of two a scale is, and keeps the precision's word.

import { power } from 'formats'

const isScale = (input) => input.name.startsWith('scaler.') && input.name.endsWith('scale')

/** @param {Found} input */
const showPower = (input) => {
  const exponent = Math.log2(Number(input.value))
  const label = input.closest('.field').querySelector('label')
  const note = label.querySelector('.power') ?? label.appendChild(document.createElement('span'))
  note.className = 'power'
  note.innerHTML = Number.isInteger(exponent) ? ` = ${power(exponent)}` : ''
}

for (const input of document.querySelectorAll('[data-run-form] input[type=number]')) {
  if (!isScale(input)) continue
  showPower(input)
  input.addEventListener('input', () => showPower(input))
}

// To the form of a sweep with what is typed here; without a script it begins with the defaults.
document.querySelector('[data-to-sweep]')?.addEventListener('click', (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return
  event.preventDefault()
  const button = document.createElement('button')
  button.formAction = '/sweeps/new'
  button.hidden = true
  document.querySelector('[data-run-form]').append(button)
  button.click()
  button.remove()
})
